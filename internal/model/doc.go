// SPDX-License-Identifier: Apache-2.0

// Package model computes what queueing theory says of load balancing, without simulation: section V of
// "6LB: Scalable and Application-Aware Load Balancing with Segment Routing", for servers in so large a
// number that a random one tells of all, and the Markov chain of two servers in section III of "HLB:
// Towards Load-Aware Load Balancing".
//
// Times are in units of the mean time that a core needs for a flow, 1/μ in 6LB; the distribution of
// that time is exponential. Load is the share of all cores that is busy, 0 to 1: 6LB's λ where a server
// has one core, as in the paper. More cores are ours; with them a server of n flows works at min(n, k).
package model
