// SPDX-License-Identifier: Apache-2.0

package srv6

import "fmt"

// NoColumn stands for the column of a candidate that is not in the row of the flow's bucket.
const NoColumn = -1

// MaxLoad is the largest number of busy and capacity units that an offer can tell exactly.
const MaxLoad = 1<<20 - 1

// The fields of an offer's argument: bpf/net/load.h.
const (
	columnShift       = 45
	noColumnBit       = 1 << 44
	wantsReportBit    = 1 << 43
	cookieShift       = 41
	returnsBit        = 1 << 40
	cookieWidths      = 4
	nextShift         = 20
	columnsInArgument = 8
)

// Offer is the argument of an offered SID (docs/understand/protocol.md, "Offers").
type Offer struct {
	// Column is the candidate's column in the row of the flow's bucket, 0 to 7, or NoColumn.
	Column int
	// WantsReport tells that the balancer takes load reports of this flow.
	WantsReport bool
	// Cookie is the width of the flow's cookie, in bits, 0 to 3. It is 0 if the flow has none,
	// because the balancer keeps state of the flow. A SID of the function Steer has only the fields
	// Cookie and Returns.
	Cookie int
	// Returns tells, in a SID of the function Steer, that a server without the flow returns the
	// packet to the balancer.
	Returns bool
	// Next is the load that the candidate would have with one connection more, up to MaxLoad. It is
	// 0 if the candidate has told no load.
	Next uint32
	// Capacity is the candidate's capacity, up to MaxLoad. It is 0 if its load source has none.
	Capacity uint32
}

// Argument returns the offer as the argument of a SID.
func (o Offer) Argument() uint64 {
	argument := uint64(o.Next&MaxLoad)<<nextShift | uint64(o.Capacity&MaxLoad)
	if o.Column == NoColumn {
		argument |= noColumnBit
	} else {
		argument |= uint64(o.Column%columnsInArgument) << columnShift
	}
	if o.WantsReport {
		argument |= wantsReportBit
	}
	if o.Returns {
		argument |= returnsBit
	}
	return argument | uint64(o.Cookie%cookieWidths)<<cookieShift
}

// ParseOffer reads the argument of an offered SID. It ignores the bits that have no meaning.
func ParseOffer(argument uint64) Offer {
	o := Offer{
		Column:      int(argument >> columnShift % columnsInArgument),
		WantsReport: argument&wantsReportBit != 0,
		Cookie:      int(argument >> cookieShift % cookieWidths),
		Returns:     argument&returnsBit != 0,
		Next:        uint32(argument >> nextShift & MaxLoad),
		Capacity:    uint32(argument & MaxLoad),
	}
	if argument&noColumnBit != 0 {
		o.Column = NoColumn
	}
	return o
}

// String returns the offer in words, such as "column 1, 3 busy of 2".
func (o Offer) String() string {
	text := fmt.Sprintf("column %d", o.Column)
	if o.Column == NoColumn {
		text = "no column"
	}
	if o.Next != 0 {
		text += fmt.Sprintf(", %d busy", o.Next-1) // without the offered connection
		if o.Capacity != 0 {
			text += fmt.Sprintf(" of %d", o.Capacity)
		}
	}
	if o.WantsReport {
		text += ", report"
	}
	if o.Cookie != 0 {
		text += fmt.Sprintf(", cookie of %d bits", o.Cookie)
	}
	if o.Returns {
		text += ", return"
	}
	return text
}
