// SPDX-License-Identifier: Apache-2.0

package accept

import "math/bits"

// A code is the 8-bit form of a load in load reports. The coded value is (Busy + 1) / Capacity: the
// connections per unit of capacity after one more connection. It is in sixteenths and rounded up.
// Values up to 2 are exact sixteenths. Above 2, codes are like floating-point numbers with a
// mantissa of 4 bits: successive codes differ by 1/32 to 1/16 of the value. The largest value is
// 31,744. The code 0 stands for an unknown load.

// ValueOfOne is the value, in sixteenths, of one connection per unit of capacity.
const ValueOfOne = 16

const (
	// codeSteps is the number of codes from a value to its double, if the value is 1 or more.
	codeSteps = 16
	// largestCode also stands for all larger values.
	largestCode = 255
)

// Code returns the code of a load, or 0 if the load is unknown. A server with a known load and a
// capacity has free capacity if and only if its code is at most 16, the code of the value 1.
func Code(l Load) uint8 {
	if !l.known() {
		return 0
	}
	value := ceilDiv(ValueOfOne*(uint64(l.Busy)+1), l.units())
	if value < codeSteps {
		return uint8(value)
	}
	exponent := uint64(bits.Len64(value/codeSteps) - 1) // 2^exponent <= value/16 < 2^(exponent+1)
	mantissa := ceilDiv(value, 1<<exponent)             // 16 to 32; 32: 16 with the next exponent
	return uint8(min(codeSteps*exponent+mantissa, largestCode))
}

// Value returns what a code stands for, in sixteenths of a connection per unit of capacity. It is 0
// for an unknown load, and otherwise 1 to 507,904.
func Value(code uint8) uint32 {
	if code < codeSteps {
		return uint32(code)
	}
	mantissa, exponent := codeSteps+code%codeSteps, code/codeSteps-1
	return uint32(mantissa) << exponent
}

// ceilDiv divides and rounds up.
func ceilDiv(a, b uint64) uint64 { return (a + b - 1) / b }
