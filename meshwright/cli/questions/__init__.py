"""Questions to the planner: options of `meshwright plan` and `meshwright doctor`, and the command `explain`."""
