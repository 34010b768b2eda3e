"""A real Kubernetes node on this machine: kubelet, containerd, runc, CNI and kube-proxy in private namespaces."""
