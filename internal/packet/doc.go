// SPDX-License-Identifier: Apache-2.0

// Package packet builds, changes and describes Ethernet frames, and defines what a balancer and an
// agent make of them.
//
// Encapsulate, Decapsulate and Advance are the reference for the frames that the programs in the
// kernel send. They are written from the RFCs, for clarity and not for speed. They share no code
// with those programs, so that tests can compare the two packet by packet.
package packet
