"""A compact LLM engine that runs on the store: schedule, run, postprocess."""
