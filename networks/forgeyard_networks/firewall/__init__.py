"""What enforces a network policy: rules as data, and one renderer for each backend that can load them."""
