"""Write a page that compares several runs."""
