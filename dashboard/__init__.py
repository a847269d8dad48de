"""Dashboard: the windows of the house. Pages and the usage API read billing; they move no money."""
