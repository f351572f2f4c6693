// SPDX-License-Identifier: Apache-2.0

// Package packet builds, changes and describes Ethernet frames. It also defines what a
// balancer and an agent make of a frame.
//
// Encapsulate, Decapsulate and Advance are the reference for the frames that the programs in the
// kernel send. They follow the RFCs, and are written for clarity and not for speed. They share no
// code with those programs, so that tests can compare both packet by packet.
package packet
