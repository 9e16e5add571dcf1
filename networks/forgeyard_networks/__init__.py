"""Networks of an attempt. Today: no outside at all, or the host network itself where a profile allows it."""
