"""The status of a service: conditions, problems, events, service levels and cost. Pure."""
