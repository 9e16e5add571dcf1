"""Networks of attempts: our own, each behind a router where its policy is enforced, or an operator's by CNI."""
