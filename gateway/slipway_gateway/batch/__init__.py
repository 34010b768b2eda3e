"""The batch API: files of requests that are answered when there is room, with a low priority."""
