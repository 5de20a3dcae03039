"""A page that shows what speculation does while a text comes, and the events that it reads."""
