// SPDX-License-Identifier: Apache-2.0

// Package packet builds, changes and explains Ethernet frames, and says what a balancer and an agent
// must do to them.
//
// Encapsulate and Server.Receive are the reference for the programs in the kernel: written from the
// RFCs for plainness, not for speed, and sharing no code with those programs, so that the two can be
// compared packet by packet.
package packet
