"""What drafts bring: their length, trees and the planner, and the rules of verification."""
