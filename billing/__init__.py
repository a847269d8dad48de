"""Billing: the only room that moves money. All of it is synchronous; it imports no other room."""
