"""The replicas of one revision: which slots get a pod, how the pod is built, and how it leaves. Pure."""
