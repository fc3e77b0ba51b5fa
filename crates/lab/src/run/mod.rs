//! Making the runs of an experiment: processes in their namespaces, readiness, windows, order, and what becomes of failures.

pub(crate) mod compare;
pub(crate) mod halt;
pub(crate) mod links;
pub(crate) mod rates;
pub(crate) mod ready;
pub(crate) mod result;
pub(crate) mod session;
