"""Routes in the forms of other servers. Each turns its fields into those of a route here, and answers in its form."""
