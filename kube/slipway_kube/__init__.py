"""A Kubernetes client library: HTTP client, watch caches, leader election, writes, Events; independent of kopf."""
