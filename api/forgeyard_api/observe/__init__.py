"""What an operator sees of a server: metrics, spans, structured logs and the security audit."""
