"""Questions that a web page asks: read from a query string, checked, and answered in a process of their own."""
