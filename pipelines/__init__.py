"""The pipeline, its compiler, local runs, schedules, doctor and commands."""
