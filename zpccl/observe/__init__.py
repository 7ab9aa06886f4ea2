"""What a person sees of a running peer or master."""
