"""Generated code of what the services say to each other and to autoscalers."""
