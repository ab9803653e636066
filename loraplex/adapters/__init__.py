"""What an adapter is and who owns it: format, weights, sources, names. No device code here."""
