"""A data set of generated speech for models such as Whisper, which turn a spectrogram into text."""

import torch
from torch import Generator, Tensor
from torch.utils.data import Dataset

from meshwright.errors import InputError
from meshwright.zoo.generated import GeneratedSamples, refuse_without_synthetic


def spectrograms(
    split: str = "train",
    bands: int = 80,
    frames: int = 3000,
    sequence: int = 448,
    vocabulary: int = 51865,
    synthetic: bool = False,
    samples: int = 1_000,
    seed: int = 0,
) -> Dataset[dict[str, Tensor]]:
    """Returns a data set of generated {input_features, labels}: a spectrogram of `bands` × `frames` numbers, and a text
    of `sequence` tokens, all of them the number of the loudest band."""
    refuse_without_synthetic("spectrograms", synthetic)
    if min(bands, frames, sequence, vocabulary) < 1:
        raise InputError(
            f"bands is {bands}, frames is {frames}, sequence is {sequence} and vocabulary is {vocabulary}: each must be"
            " at least 1"
        )
    return GeneratedSpectrograms(split, bands, frames, sequence, vocabulary, samples, seed)


class GeneratedSpectrograms(GeneratedSamples):
    """Noise with one loud band."""

    def __init__(
        self, split: str, bands: int, frames: int, sequence: int, vocabulary: int, samples: int, seed: int
    ) -> None:
        super().__init__(split, samples, seed)
        self.bands, self.frames, self.sequence, self.vocabulary = bands, frames, sequence, vocabulary

    def make(self, index: int, generator: Generator) -> dict[str, Tensor]:
        loudest = int(torch.randint(min(self.bands, self.vocabulary), (), generator=generator))
        features = torch.randn((self.bands, self.frames), generator=generator, dtype=torch.float32) / 4
        features[loudest] += 1
        return {"input_features": features, "labels": torch.full((self.sequence,), loudest)}
