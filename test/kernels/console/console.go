// SPDX-License-Identifier: Apache-2.0

// Package console has the lines by which a guest tells the command kernels what passed.
package console

// The beginnings of a line about a check, and the whole last line.
const (
	Passed = "guest: passed: "
	Failed = "guest: FAILED: "
	End    = "guest: end"
)
