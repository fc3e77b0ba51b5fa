/* SPDX-License-Identifier: MIT OR Apache-2.0 OR GPL-2.0-only */
/* Relays single datagrams between bound channels, and those of a forwarder's sessions, at TC ingress or in the driver, and grants leases to
 * flows at TC egress: three programs in one object, which share their maps. */
#include "leave.h"
#include "xdp.h"

char _license[] SEC("license") = "Dual MIT/GPL";
