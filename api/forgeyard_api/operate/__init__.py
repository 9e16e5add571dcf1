"""Commands of whoever runs a host: what runs on it, what it says, how it is stopped; and failures looked at again."""
