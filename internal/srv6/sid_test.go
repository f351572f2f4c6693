// SPDX-License-Identifier: Apache-2.0

package srv6

import (
	"net/netip"
	"testing"

	"pgregory.net/rapid"
)

func TestSIDString(t *testing.T) {
	locator := netip.MustParsePrefix("fd00:5:0:1::/64")
	for _, c := range []struct {
		sid        SID
		addr, text string
	}{
		{SID{locator, Host, 0}, "fd00:5:0:1::", "fd00:5:0:1::"},
		{SID{locator, Host, 1}, "fd00:5:0:1::1", "fd00:5:0:1::1"},
		{SID{locator, ConnectAvail, 0}, "fd00:5:0:1:1::", "fd00:5:0:1::ca"},
		{SID{locator, ConnectForce, 0}, "fd00:5:0:1:2::", "fd00:5:0:1::cf"},
		{SID{locator, ConnectAvail, Offer{Column: 5, WantsReport: true, Next: 4, Capacity: 2}.Argument()},
			"fd00:5:0:1:1:a800:40:2", "fd00:5:0:1::ca(column 5, 3 busy of 2, report)"},
		{SID{locator, ConnectForce, Offer{Column: NoColumn, Next: 67}.Argument()},
			"fd00:5:0:1:2:1000:430:0", "fd00:5:0:1::cf(no column, 66 busy)"},
		{SID{locator, AckStickiness, 0}, "fd00:5:0:1:3::", "fd00:5:0:1::as"},
		{SID{locator, RecoverStickiness, 0}, "fd00:5:0:1:4::", "fd00:5:0:1::rs"},
		{SID{locator, Deliver, 0}, "fd00:5:0:1:5::", "fd00:5:0:1::dv"},
		{SID{locator, Steer, 0}, "fd00:5:0:1:6::", "fd00:5:0:1::st"},
		{SID{locator, CreateStickiness, 0x2a}, "fd00:5:0:1:11::2a", "fd00:5:0:1::cs(0x2a)"},
		{SID{locator, RemoveStickiness, MaxArgument}, "fd00:5:0:1:12:ffff:ffff:ffff",
			"fd00:5:0:1::rms(0xffffffffffff)"},
		{SID{locator, 0x99, 0}, "fd00:5:0:1:99::", "fd00:5:0:1:99::"},
		{SID{netip.MustParsePrefix("::/64"), Deliver, 0}, "::5:0:0:0", "::dv"},
	} {
		if got := c.sid.Addr(); got != netip.MustParseAddr(c.addr) {
			t.Errorf("%+v: address %v, want %s", c.sid, got, c.addr)
		}
		if got := c.sid.String(); got != c.text {
			t.Errorf("%+v: text %q, want %q", c.sid, got, c.text)
		}
	}
}

func TestFunctionString(t *testing.T) {
	for f, want := range map[Function]string{
		Deliver: "deliver", RemoveStickiness: "remove-stickiness", Host: "host", 0x99: "function 0x0099",
	} {
		if got := f.String(); got != want {
			t.Errorf("function %#x: %q, want %q", uint16(f), got, want)
		}
	}
}

func TestParseOfferInvertsArgument(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := Offer{
			Column:      rapid.IntRange(NoColumn, 7).Draw(t, "column"),
			WantsReport: rapid.Bool().Draw(t, "report"),
			Cookie:      rapid.IntRange(0, 3).Draw(t, "cookie"),
			Returns:     rapid.Bool().Draw(t, "returns"),
			Next:        rapid.Uint32Range(0, MaxLoad).Draw(t, "next"),
			Capacity:    rapid.Uint32Range(0, MaxLoad).Draw(t, "capacity"),
		}
		argument := want.Argument()
		if got := ParseOffer(argument); argument > MaxArgument || got != want {
			t.Fatalf("%+v became %#x, and that %+v", want, argument, got)
		}
	})
}

// The example of docs/understand/protocol.md.
func TestReportArgument(t *testing.T) {
	report := Report{Serial: 0x123456, Load: 0x24, First: FirstCandidate{Column: 5, Load: 0x20}}
	sid := SID{netip.MustParsePrefix("fd00:5:0:1::/64"), Host, report.Argument()}
	if got := sid.Addr().String(); got != "fd00:5:0:1:0:246:8ac4:8520" {
		t.Errorf("%+v is %s", report, got)
	}
}

func TestParseReportInvertsArgument(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := Report{
			Serial:  rapid.Uint32Range(0, 1<<27-1).Draw(t, "serial"),
			Load:    rapid.Uint8().Draw(t, "load"),
			IsFirst: rapid.Bool().Draw(t, "first"),
		}
		if !want.IsFirst {
			want.First.Column = rapid.IntRange(NoColumn, 7).Draw(t, "column")
			if want.First.Column != NoColumn {
				want.First.Load = rapid.Uint8().Draw(t, "first load")
			}
		}
		argument := want.Argument()
		got, ok := ParseReport(argument)
		if argument > MaxArgument || got != want || ok != (argument != 0) {
			t.Fatalf("%+v became %#x, and that %+v, %v", want, argument, got, ok)
		}
	})
}

func TestParseInvertsAddr(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		addr := netip.AddrFrom16([16]byte(rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "address")))
		if got := Parse(addr).Addr(); got != addr {
			t.Fatalf("%v became %v", addr, got)
		}
	})
}
