"""A page that shows what speculation does while a text is generated, and the events that it reads."""
