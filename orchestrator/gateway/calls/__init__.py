"""Tool calls in a model's output: state machines from text to text and calls."""
