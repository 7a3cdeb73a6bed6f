"""Records the training of any script from outside: weights, gradients, norms, losses and digests of the samples.

This package is loaded into the processes of a command by `start_up/sitecustomize.py`, which stands on their path. It
uses only the standard library and torch, imports only itself, relatively, and so it also runs in environments in which
Meshwright is not installed. Nothing in a record is executed when it is read.

A record is a folder with `settings.json` (see `settings.py`), which the auditing process writes, and one folder for
each rank that trained, `rank-00000`:

    header.json               what the rank is, and the layout of its parameters and buffers (see below)
    events.jsonl              one JSON object in each line: `kind`, `step` (from 1) and the fields of the kind
    0001-KIND-N.safetensors   tensors of step 1, named `name#i`: part i of the whole tensor `name`; step 0 is the start.
                              Of large ones, `name#i.sketch` (sketches.py) and `name#i.square`, the sum of squares

`header.json`:

    rank, world_size, python, torch, device, backend, arguments, stage (of a pipeline, or null)
    dtypes       floating-point types that were computed in: of parameters, autocast and mixed-precision policies
    parameters   name → {"shape": of the whole tensor, "dtype", "trained", "layout": where the layout is known from,
                 "parts": [{"box": [[start, size], …]} or {"flat": [start, end]}], "same_as": first name if tied}
    buffers      name → the same
    samplers     of samplers that shuffle, the class and the package that made it ("" for the script)
    notes        sentences about what could not be recorded

A part is a box of the whole tensor (start and size in each dimension), or a range of the flattened whole tensor. Kinds
of tensors:

    own          weights and buffers as the script made them (step 0)
    start        those that the training starts from, after `--start` (step 0)
    unclipped    gradients when the norm for clipping is computed, if the script clips
    gradient     gradients as the optimizer gets them
    weight       weights after the step
    buffer       buffers after the step

Kinds of events:

    inputs    of a call of the model while it trains: `module`, `leaf`, `shape`, `dtype`, `rows` (a digest of each row
              along the first dimension, as text), `elements` (sum of digests of all elements, as text)
    loss      a scalar that backward was called on: `value`, `dtype`
    targets   of a call of cross_entropy or nll_loss: `valid`, `total`, and `summed`, the sum of the valid ones' losses
    norm      that gradients were clipped by: `value`, `limit`, `names`, `partial` (of a part only), `counted` (no copy)
    scale     of a gradient scaler: `value`
    options   of an optimizer, when it first steps: `optimizer` (class), `names`, and `values`
    step      an optimizer stepped: `optimizer`, `names`
    end       `reason`: steps | exit | error, and `message`
"""
