"""Launching vLLM, Dynamo and the router; the load; the stand-in model."""
