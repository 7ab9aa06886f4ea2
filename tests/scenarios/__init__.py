"""Golden scenarios of the protocol: one story each, with whole masters and peers in a scripted world."""
