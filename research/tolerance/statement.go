// SPDX-License-Identifier: Apache-2.0

package tolerance

import (
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"strings"
)

// Relation is the relation between a measured value and that of a statement.
type Relation string

// The relations.
const (
	About   Relation = "about"
	AtMost  Relation = "at most"
	AtLeast Relation = "at least"
	// MoreThan is visibly more: by at least the tolerance.
	MoreThan Relation = "more than"
)

// bounds are the relations that Statement.String writes before the number.
var bounds = []Relation{AtMost, AtLeast, MoreThan}

// Statement is a number or a bound that a paper states.
type Statement struct {
	Relation Relation
	Value    float64
}

// Printed is a statement as a paper prints it.
type Printed struct {
	Statement
	// Rounding is the largest error of the value by the rounding of the printed number. It is 0 for
	// bounds, and for Equal.
	Rounding float64
}

// Equal is the word that Parse reads for two equal quantities.
const Equal = "equal"

// Parse reads a statement: a number as the paper prints it, such as 24.64; a quotient of two such
// numbers, such as 0.22 / 0.16; a bound, such as "at most 1"; or "equal", which says that the ratio
// of two quantities is exactly 1.
func Parse(text string) (Printed, error) {
	if text == Equal {
		return Printed{Statement: Statement{About, 1}}, nil
	}
	for _, relation := range bounds {
		if rest, ok := strings.CutPrefix(text, string(relation)+" "); ok {
			v, err := strconv.ParseFloat(rest, 64)
			return Printed{Statement: Statement{relation, v}}, err
		}
	}
	numerator, denominator, isQuotient := strings.Cut(text, " / ")
	v, err := strconv.ParseFloat(numerator, 64)
	if err != nil {
		return Printed{}, err
	}
	p := Printed{Statement{About, v}, halfUnit(numerator)}
	if !isQuotient {
		return p, nil
	}
	d, err := strconv.ParseFloat(denominator, 64)
	if err != nil {
		return Printed{}, err
	}
	smallest := d - halfUnit(denominator)
	if v < 0 || smallest <= 0 {
		return Printed{}, fmt.Errorf("%q: must be a quotient of positive numbers", text)
	}
	p.Value = v / d
	p.Rounding = (v+p.Rounding)/smallest - p.Value
	return p, nil
}

// halfUnit returns half a unit of the last digit of a number as the paper prints it.
func halfUnit(printed string) float64 {
	_, decimals, _ := strings.Cut(printed, ".")
	return 0.5 * math.Pow10(-len(decimals))
}

// Excess returns by how much a measured value is outside of the tolerance. It is negative, or 0,
// if the value agrees with the statement.
func (s Statement) Excess(measured, tolerance float64) float64 {
	numeric := numericError * math.Abs(s.Value)
	switch s.Relation {
	case AtMost:
		return measured - s.Value - tolerance - numeric
	case AtLeast:
		return s.Value - measured - tolerance - numeric
	case MoreThan:
		return s.Value + tolerance - measured - numeric
	default:
		return math.Abs(measured-s.Value) - tolerance - numeric
	}
}

func (s Statement) String() string {
	if s.Relation == About {
		return fmt.Sprintf("%.4g", s.Value)
	}
	return fmt.Sprintf("%s %.4g", s.Relation, s.Value)
}

// MarshalJSON writes a number, or a string such as "at most 0.045".
func (s Statement) MarshalJSON() ([]byte, error) {
	if s.Relation == About {
		return json.Marshal(s.Value)
	}
	return json.Marshal(s.String())
}

// UnmarshalJSON reads the output of MarshalJSON.
func (s *Statement) UnmarshalJSON(b []byte) error {
	if json.Unmarshal(b, &s.Value) == nil {
		s.Relation = About
		return nil
	}
	var text string
	if err := json.Unmarshal(b, &text); err != nil {
		return err
	}
	for _, relation := range bounds {
		if rest, ok := strings.CutPrefix(text, string(relation)+" "); ok {
			s.Relation = relation
			_, err := fmt.Sscan(rest, &s.Value)
			return err
		}
	}
	return fmt.Errorf("statement %q: neither a number nor a bound", text)
}
