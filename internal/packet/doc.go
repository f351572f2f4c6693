// SPDX-License-Identifier: Apache-2.0

// Package packet builds, changes and describes Ethernet frames, and defines what a balancer and an
// agent must do with them.
//
// Encapsulate and Server.Receive are the reference for the programs in the kernel. They are written
// from the RFCs, for clarity and not for speed. They share no code with those programs, so that
// tests can compare the two packet by packet.
package packet
