"""Tool calls in a model's output: state machines that split it into text and calls."""
