"""Networks that CNI plugins make: an operator's own, by the name of its configuration (CNI specification 1.1)."""
