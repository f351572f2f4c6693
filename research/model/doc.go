// SPDX-License-Identifier: Apache-2.0

// Package model computes results of queueing theory about load balancing, without simulation. It
// has section V of "6LB: Scalable and Application-Aware Load Balancing with Segment Routing",
// which assumes infinitely many servers. It also has the Markov chain of two servers in section
// III of "HLB: Toward Load-Aware Load Balancing".
//
// Times are in units of the mean time that a core needs for a flow, 1/μ in 6LB. The distribution
// of that time is exponential. Load is the share of all cores that is busy, 0 to 1. It is 6LB's λ
// if a server has one core, as in the paper. Servers with several cores are an extension: a server
// with n flows on k cores works at the rate min(n, k).
package model
