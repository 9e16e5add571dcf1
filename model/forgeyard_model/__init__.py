"""The words of the project: requests, policies, plans and results. Imports no other area, touches no host."""
