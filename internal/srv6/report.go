// SPDX-License-Identifier: Apache-2.0

package srv6

import "time"

// ReportTick is the unit of a report's serial: 2^22 ns.
const ReportTick = time.Duration(1 << 22)

// Report is the argument of a server's own segment in a signal: the server's load, and what the
// first candidate of the flow has told (docs/understand/protocol.md, "Load reports").
type Report struct {
	// Serial is the server's monotonic clock in ticks of ReportTick, modulo 2^27.
	Serial uint32
	// Load is the code of the server's load (accept.Code). It is 0 if the load is unknown.
	Load uint8
	// IsFirst tells that the sender was the first candidate. First is then not set.
	IsFirst bool
	// First is the first candidate. Its column is NoColumn if the candidate is not known.
	First FirstCandidate
}

// FirstCandidate is the candidate to which a flow was offered first.
type FirstCandidate struct {
	Column int   // in the row of the flow's bucket, 0 to 7, or NoColumn
	Load   uint8 // the code of the load that it has told; 0 if it has told none
}

// The fields of a report: bpf/net/report.h.
const (
	serialBits         = 27
	serialShift        = 21
	ownLoadShift       = 13
	isFirstBit         = 1 << 12
	firstNoColumnBit   = 1 << 11
	firstColumnShift   = 8
	firstLoadMask      = 1<<8 - 1
	serialMask         = 1<<serialBits - 1
	firstColumnsModulo = 8
)

// Argument returns the report as the argument of a segment.
func (r Report) Argument() uint64 {
	argument := uint64(r.Serial&serialMask)<<serialShift | uint64(r.Load)<<ownLoadShift
	switch {
	case r.IsFirst:
		return argument | isFirstBit
	case r.First.Column == NoColumn:
		return argument | firstNoColumnBit
	}
	return argument | uint64(r.First.Column%firstColumnsModulo)<<firstColumnShift | uint64(r.First.Load)
}

// ParseReport reads the argument of a server's segment. It returns false if there is no report: the
// argument is then 0.
func ParseReport(argument uint64) (r Report, ok bool) {
	r.Serial = uint32(argument >> serialShift & serialMask)
	r.Load = uint8(argument >> ownLoadShift)
	switch {
	case argument&isFirstBit != 0:
		r.IsFirst = true
	case argument&firstNoColumnBit != 0:
		r.First.Column = NoColumn
	default:
		r.First.Column = int(argument >> firstColumnShift % firstColumnsModulo)
		r.First.Load = uint8(argument & firstLoadMask)
	}
	return r, argument != 0
}
