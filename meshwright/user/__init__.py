"""What users write: the sections of a job, callables by import path, and code that is imported and run."""
