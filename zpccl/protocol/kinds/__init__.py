"""What differs between the kinds of operations. What they have in common is in ../operation.py."""
