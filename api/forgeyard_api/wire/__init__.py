"""What crosses the socket: messages, and the model's types as messages and back."""
