"""Generated code of the messages between the services, and of autoscalers'."""
