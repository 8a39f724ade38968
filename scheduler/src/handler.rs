//! Profile handlers: which profiles a request runs, and what becomes of their picks.

pub(crate) mod single;
