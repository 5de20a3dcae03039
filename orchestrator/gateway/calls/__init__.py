"""What a model writes: state machines that split it into reasoning, text and tool calls."""
