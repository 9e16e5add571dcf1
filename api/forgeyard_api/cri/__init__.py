"""The operator's view: attempts as pods and containers of the Container Runtime Interface, for `crictl`."""
