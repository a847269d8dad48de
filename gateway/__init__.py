"""Gateway: the way of a request to a model server and back. The only asynchronous room."""
