"""The two pipelines, their compiler, local runs, schedules, doctor and commands."""
