"""A process that keeps the containers of one runtime, so that they outlive the server that asked for them."""
