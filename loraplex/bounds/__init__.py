"""What strangers send is counted before it is parsed."""
